from .evaluation import (
    Scores as Scores,
    SearchResult as SearchResult,
    Selection as Selection,
    measure_questions as measure_questions,
    score_questions as score_questions,
    search_configurations as search_configurations,
    select_configuration as select_configuration,
)
from .language_model import LanguageModel as LanguageModel
from .prompts import TEMPLATES as TEMPLATES, scoring_names as scoring_names
from .questions import (
    Question as Question,
    chance_level as chance_level,
    load_questions as load_questions,
    make_questions as make_questions,
)
