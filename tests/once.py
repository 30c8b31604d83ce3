"""A plugin of pytest: ``-p tests.once --once=PATH`` runs each test below PATH with the first of its parameters only."""


def pytest_addoption(parser):
    parser.addoption("--once", action="append", default=[], metavar="PATH")


def pytest_collection_modifyitems(config, items):
    folders = [config.rootpath / path for path in config.getoption("--once")]
    seen, kept, left_out = set(), [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        again = name in seen and any(item.path.is_relative_to(folder) for folder in folders)
        (left_out if again else kept).append(item)
        seen.add(name)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
