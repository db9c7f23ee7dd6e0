"""Old name of `hf_sphere.commands.command_line`, for one release."""

from hf_sphere.utils.renamed import find_renamed

__getattr__ = find_renamed(__name__)
