"""Transport: the machine contract, frames, links, regions and shared memory."""
