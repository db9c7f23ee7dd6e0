from .heads import (
    AdaFaceLoss as AdaFaceLoss,
    ArcFaceLoss as ArcFaceLoss,
    CosFaceLoss as CosFaceLoss,
    CosineSoftmaxLoss as CosineSoftmaxLoss,
    ETFLoss as ETFLoss,
    HeadLoss as HeadLoss,
    LossCheckpointCallback as LossCheckpointCallback,
    MetricLearningLoss as MetricLearningLoss,
    PrototypeLoss as PrototypeLoss,
    ProxyAnchorLoss as ProxyAnchorLoss,
    SentenceTransformerLoss as SentenceTransformerLoss,
    SubCenterArcFaceLoss as SubCenterArcFaceLoss,
    VMFSoftmaxLoss as VMFSoftmaxLoss,
    trainer_loss as trainer_loss,
)
from .pairs import InfoNCELoss as InfoNCELoss, SupConLoss as SupConLoss
