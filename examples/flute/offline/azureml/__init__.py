"""A stand-in for azureml-core where FLUTE is run without it; FLUTE imports it all the same."""
