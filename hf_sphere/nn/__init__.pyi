from .calibration import fit_calibration as fit_calibration
from .heads import HEADS as HEADS, Head as Head, HeadOutput as HeadOutput, build_head as build_head
from .heads.cosine import (
    AdaFaceHead as AdaFaceHead,
    ArcFaceHead as ArcFaceHead,
    CosFaceHead as CosFaceHead,
    CosineHead as CosineHead,
    ProxyAnchorHead as ProxyAnchorHead,
    SubCenterArcFaceHead as SubCenterArcFaceHead,
)
from .heads.prototype import ETFHead as ETFHead, PrototypeHead as PrototypeHead
from .heads.softmax import (
    AngularHead as AngularHead,
    HyperbolicHead as HyperbolicHead,
    SoftmaxHead as SoftmaxHead,
    SpherizedHead as SpherizedHead,
)
from .heads.vmf import VMFHead as VMFHead
from .layers import (
    SPHERIZATION_SETTINGS as SPHERIZATION_SETTINGS,
    AngularConv2d as AngularConv2d,
    AngularLinear as AngularLinear,
    SphericalConv2d as SphericalConv2d,
    SphericalLinear as SphericalLinear,
    Spherization as Spherization,
)
from .parameter_free import PoleRegression as PoleRegression, PrototypicalClassifier as PrototypicalClassifier
from .sentence_embedding import Spherize as Spherize
