"""The environment `detection`: images whose objects are to be named and located."""
