"""Links: bounded, ordered channels of frames to one incarnation of one peer.

`interface` is what the layers above see, `base` what all transports share. What runs at every frame is
compiled (`_link.pyx`). Imports `memory`, `capture` and `clock`. Begin with `interface`.
"""
