"""A Flower project that trains by an objective of fedskew."""
