"""What is run: the model, its samples, and the steps that exercise what a recipe asks for."""
