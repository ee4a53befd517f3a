"""The backward for Hopper: a tile of keys stays, tiles of queries pass by it."""
