"""Examples of the Space; the tests of hf_sphere also compute them."""

test_cases = [
    {
        "predictions": [1, 0, 2, 3],
        "references": [1, 0, 2, 3],
        "result": {"accuracy": 1.0, "predictions": [1, 0, 2, 3]},
    },
    {
        "predictions": [1, 0, 0, 3],
        "references": [1, 2, 2, 0],
        "result": {"accuracy": 0.25, "predictions": [1, 0, 0, 3]},
    },
    {
        "predictions": [0, 0],
        "references": [0, 1],
        "stem": [["word", "language"], ["bright", "brighter"]],
        "choice": [
            [["note", "music"], ["paint", "portrait"], ["tale", "story"], ["week", "year"]],
            [["big", "easy"], ["cheap", "cheaper"]],
        ],
        "groups": ["parts", "comparatives"],
        "result": {
            "accuracy": 0.5,
            "predictions": [0, 0],
            "chance_level": 0.375,
            "accuracy_by_group": {"comparatives": 0.0, "parts": 1.0},
        },
    },
]
