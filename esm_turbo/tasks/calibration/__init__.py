"""Calibrating a model on protein records."""
