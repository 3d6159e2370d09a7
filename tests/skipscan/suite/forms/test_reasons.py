import pytest

NAME, VERSION = "torch", (2, 1)
LONG = "put " + "together"
PARTS = {"why": "from a dict"}


@pytest.mark.skip(reason="it's \"quoted\"")
def test_quotes():
    pass


@pytest.mark.skip(reason=f"{NAME} {VERSION[0]}.{VERSION[1]:02d} {NAME!r}")
def test_f_string():
    pass


@pytest.mark.skip(reason="implicit "
                         'concatenation, isn\'t it')
def test_implicit():
    pass


@pytest.mark.skip(reason=LONG)
def test_constant():
    pass


@pytest.mark.skip(reason="%s and %d" % ("percent", 3))
def test_percent():
    pass


@pytest.mark.skip(reason="{} {name}".format("format", name=NAME))
def test_format():
    pass


@pytest.mark.skip(reason=PARTS["why"])
def test_dict():
    pass


@pytest.mark.skip(reason="ünïcode ✓")
def test_unicode():
    pass


@pytest.mark.skip(reason="""two
lines""")
def test_lines():
    pass


@pytest.mark.skip(reason=", ".join(["a", "b"]))
def test_join():
    pass
