"""Where blocks go when they leave the device: host memory, disk, later elsewhere. Knows no sequence and no kernel.

A cache asks `below`, made from `options`, about its waiting sequences. `usable_length` says how much of a prompt can be
had, a `prompt_load` holds what comes up for it, and `transfer` carries blocks: down at eviction, where `hit_value` says
they are worth it, and up before a step. On the way they are as `block_format` makes them. The tiers, `host` and `disk`,
follow the protocol of `base`: an `eviction_order` says what goes, an `identity` whose blocks they are; `mover` and
`pieces` copy. Beside them stand `elastic`, memory that moves between groups, and `export_import`, files for other
machines.
"""
