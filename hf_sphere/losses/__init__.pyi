from .adapters import (
    LossCheckpointCallback as LossCheckpointCallback,
    MetricLearningLoss as MetricLearningLoss,
    SentenceTransformerLoss as SentenceTransformerLoss,
    trainer_loss as trainer_loss,
)
from .cached import cached_step as cached_step
from .heads import (
    AdaFaceLoss as AdaFaceLoss,
    ArcFaceLoss as ArcFaceLoss,
    CosFaceLoss as CosFaceLoss,
    CosineSoftmaxLoss as CosineSoftmaxLoss,
    ETFLoss as ETFLoss,
    HeadLoss as HeadLoss,
    PrototypeLoss as PrototypeLoss,
    ProxyAnchorLoss as ProxyAnchorLoss,
    SubCenterArcFaceLoss as SubCenterArcFaceLoss,
    VMFSoftmaxLoss as VMFSoftmaxLoss,
)
from .pairs import (
    CrossBatchSupConLoss as CrossBatchSupConLoss,
    InfoNCELoss as InfoNCELoss,
    SigLIPLoss as SigLIPLoss,
    SupConLoss as SupConLoss,
)
from .uniformity import (
    HeatKernelLoss as HeatKernelLoss,
    KoLeoLoss as KoLeoLoss,
    SlicedUniformityLoss as SlicedUniformityLoss,
)
