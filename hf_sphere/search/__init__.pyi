from .calibration import neutral_texts as neutral_texts
from .compression import CompressedSpace as CompressedSpace
from .duplicates import Duplicates as Duplicates
from .encoder import ImageEncoder as ImageEncoder, TextEncoder as TextEncoder, load_encoder as load_encoder
from .extract import extract_embeddings as extract_embeddings, load_embedding_model as load_embedding_model
from .index import ImageIndex as ImageIndex
from .lance import LanceSpace as LanceSpace
from .matching import Matches as Matches
from .neighbor_search import NeighborSearch as NeighborSearch
from .report import VectorReport as VectorReport, report_vectors as report_vectors
from .source import ImageSource as ImageSource
from .space import EmbeddingSpace as EmbeddingSpace
from .store import Embeddings as Embeddings, embeddings_writer as embeddings_writer, read_embeddings as read_embeddings
from .vectors import read_vectors as read_vectors
