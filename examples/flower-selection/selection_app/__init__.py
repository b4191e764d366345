"""A Flower project with a selection and a weighting of fedskew."""
