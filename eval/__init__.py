"""Whether the longer context works: loss by position, retrieval, and the report of a run."""
