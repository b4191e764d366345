"""A Flower project with an objective of fedskew."""
