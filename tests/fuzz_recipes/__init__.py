"""Random recipes, each verified: what combinations of options train wrong, crash, or are refused without a reason?"""
