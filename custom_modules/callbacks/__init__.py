"""Lightning callbacks: the only modules of this room that import lightning."""
