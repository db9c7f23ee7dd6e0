from .language_model import LanguageModel as LanguageModel
from .prompts import (
    NEGATIVE_PERMUTATIONS as NEGATIVE_PERMUTATIONS,
)
from .prompts import (
    POSITIVE_PERMUTATIONS as POSITIVE_PERMUTATIONS,
)
from .prompts import (
    TEMPLATES as TEMPLATES,
)
from .questions import (
    Question as Question,
)
from .questions import (
    chance_level as chance_level,
)
from .questions import (
    load_questions as load_questions,
)
from .questions import (
    make_questions as make_questions,
)
from .score_cache import ScoreCache as ScoreCache
from .scoring import (
    SCORINGS as SCORINGS,
)
from .scoring import (
    Scores as Scores,
)
from .scoring import (
    measure_questions as measure_questions,
)
from .scoring import (
    score_questions as score_questions,
)
from .search import (
    SearchResult as SearchResult,
)
from .search import (
    Selection as Selection,
)
from .search import (
    join_results as join_results,
)
from .search import (
    search_configurations as search_configurations,
)
from .search import (
    select_configuration as select_configuration,
)
from .statistics import (
    SelectionNoise as SelectionNoise,
)
from .statistics import (
    bootstrap_interval as bootstrap_interval,
)
from .statistics import (
    selection_noise as selection_noise,
)
