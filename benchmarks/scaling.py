TITLE = ""


def measure(settings):
    return []
