"""What is trained: model cards, stages, ladders of stages, layouts, and the recipe functions."""
