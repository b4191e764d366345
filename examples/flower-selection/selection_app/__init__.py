"""A Flower project that takes its cohorts and weights from fedskew."""
