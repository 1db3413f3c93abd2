"""Fitting codecs to calibration statistics: moments, transforms and Lloyd-Max codebooks."""
