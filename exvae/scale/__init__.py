"""One run on many devices: the mesh and how arrays lie on it (`sharding`), several processes (`processes`)."""
