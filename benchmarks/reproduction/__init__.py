"""The queue of runs that measure the library, and the tables of their results."""
