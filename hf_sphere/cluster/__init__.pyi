from .mixture import VonMisesFisherMixture as VonMisesFisherMixture
from .spherical_k_means import SphericalKMeans as SphericalKMeans
