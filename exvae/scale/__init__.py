"""One run on many devices: the mesh and the placement of arrays (`sharding`), and several processes (`processes`)."""
