"""The axes of a mesh along which training goes."""

from __future__ import annotations

from zbmd.training.sharded.mesh import Mesh
from zbmd.transport.errors import UserError

DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS = "dp", "pp", "tp"
AXES = (DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS)


def require_axes(mesh: Mesh) -> None:
    """Raise `UserError` for an axis along which nothing is trained."""
    strange = [axis for axis in mesh.axes if axis not in AXES]
    if strange:
        raise UserError(
            f"there is no training along {', '.join(strange)} on a mesh: use dp, pp and tp, for data, "
            "pipeline stages and tensors."
        )
