"""The search of the documentation site finds the page of a question, in a browser."""

import functools
import http.server
import threading

import pytest

QUESTIONS = {
    "near duplicate": "tasks/duplicates",
    "number of clusters": "tasks/cluster",
    "unknown": "tasks/unknown-inputs",
    "reproduce table": "methods/index",
    "agent memory": "tasks/relevant",
    "voice": "tasks/who",
    "threshold": "tasks/match",
    "search my photos": "tasks/own-images",
    "which loss": "losses",
    "choose a head": "which-head",
    "calibration": "tasks/classify",
    "sentence embeddings": "tasks/text-embeddings",
    "wrong labels": "tasks/duplicates",
    "larger than memory": "tasks/beyond-memory",
    "million classes": "scaling",
    "without internet": "weights",
    "significance": "compare",
    "interactive sphere": "notebooks/gallery",
    "not ours": "tasks/unknown-inputs",
}


@pytest.fixture(scope="module")
def address(site):
    """Address at which the site is served."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def found_pages(address, chromium):
    """The pages that the search box lists for each question, best first."""
    page = chromium.new_page(viewport={"width": 1280, "height": 800})
    page.goto(f"{address}/index.html")
    box, results = page.locator(".md-search__input"), page.locator(".md-search-result__item")
    box.click()
    found = {}
    for question in QUESTIONS:
        for text, state in (("", "detached"), (question, "attached")):
            box.fill(text)
            box.press("End")  # the page listens to keys
            results.first.wait_for(state=state)
        links = results.locator("> a").evaluate_all("links => links.map(link => link.pathname)")
        found[question] = [*dict.fromkeys(link.strip("/").removesuffix(".html") for link in links)]
    page.close()
    return found


def test_the_page_of_a_question_is_among_the_first_three_results(found_pages):
    assert {question: pages for question, pages in found_pages.items() if QUESTIONS[question] not in pages[:3]} == {}


def test_the_page_of_most_questions_is_the_first_result(found_pages):
    later = {question: pages[0] for question, pages in found_pages.items() if QUESTIONS[question] != pages[0]}
    assert len(later) <= len(QUESTIONS) // 5, later
