"""Groups from programs on `atroposlib`: the API that they push to, the client of a `run-api`, the form of a group."""
