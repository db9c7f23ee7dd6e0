"""Old name of `hf_sphere.search`, for one release."""

from hf_sphere.utils.renamed import find_renamed

__getattr__ = find_renamed(__name__)
