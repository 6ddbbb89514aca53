"""The small text-to-image model that ships with the package, and the little world it knows.

Takes prompts of its grammar and pictures, returns scenes, drawings and verdicts; never trains
(`tools/train_demo.py` does) and never touches memory budgets.
"""
