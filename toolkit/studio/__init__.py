"""`toolkit studio`: a local web page over the Python API. Needs the extra ``studio``; only its command imports it."""
