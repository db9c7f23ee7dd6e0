from .augmentation import Augmentation as Augmentation
from .batches import (
    FewShotBatches as FewShotBatches,
    ImageBatches as ImageBatches,
    ImagesFromDisk as ImagesFromDisk,
    ImagesInMemory as ImagesInMemory,
    few_shot_data as few_shot_data,
)
from .decoding import CorruptImageError as CorruptImageError, ImageShape as ImageShape
from .images import (
    ImageData as ImageData,
    ImageSplit as ImageSplit,
    load_image_data as load_image_data,
    load_image_split as load_image_split,
)
from .options import (
    ImageDataOptions as ImageDataOptions,
    ImageSourceOptions as ImageSourceOptions,
    OpenSetOptions as OpenSetOptions,
    TextDataOptions as TextDataOptions,
    ValueOptions as ValueOptions,
)
from .sampling import Episodes as Episodes, EpisodeSampler as EpisodeSampler
from .streams import ImageStream as ImageStream
from .targets import COMPUTED_VALUES as COMPUTED_VALUES
from .text import (
    Masking as Masking,
    TextBatches as TextBatches,
    TextData as TextData,
    Vocabulary as Vocabulary,
    load_text_data as load_text_data,
)
