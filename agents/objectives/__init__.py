"""Loss components, one per file; `choose.components` picks those that an objective and a sharing rule need."""
