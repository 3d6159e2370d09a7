"""Small models that an exporter may get wrong, each with truth at sizes and values of its own.

Every file of cases is one class of mistakes. A case is a model, the calls that are recorded, and further calls. After
``observe``, ``export``, ``to_onnx`` and ``verify``, the graph is called with all of them, and has to be right (it
returns what eager PyTorch returns) or loud (an error of exportkit, or a report that is not proven). A wrong result that
nothing announces is silent, and fails the test. So does refusing a call that the case says has to be served.

``python -m tests.trust`` counts right, loud and silent; ``python -m tests.trust split modulo`` only runs the cases with
these words in their class or name.
"""
