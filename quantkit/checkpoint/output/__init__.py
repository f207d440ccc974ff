"""Write a directory that a crash leaves resumable: lock, journal, shards, atomic files."""
