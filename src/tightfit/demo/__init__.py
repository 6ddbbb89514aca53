"""The small text-to-image model that ships with the package, its prompts, training images and scoring.

Takes prompts of its grammar and images, returns scenes, drawings and verdicts; never trains
(`tools/train_demo.py` does) and never touches memory budgets.
"""
