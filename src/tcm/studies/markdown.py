"""A study's results as plain Markdown, for `docs/`."""

from tcm.studies.results import StudyResults
from tcm.studies.words import (
    Table,
    conditions,
    failures,
    left_out,
    paper_table,
    tables,
    verdict_parts,
    verdict_sentence,
)


def render_markdown(results: StudyResults) -> str:
    """The claim, the verdict and the tables."""
    study = results.study
    parts = [
        f"## {study.title}",
        f"{study.question} The claim ({study.where}): {study.claim}",
        f"**{verdict_sentence(results)}**",
        *(["\n".join(f"- {part}" for part in parts)] if (parts := verdict_parts(results)) else []),
        *(markdown_table(table) for table in tables(results)),
        conditions(results),
    ]
    if failed := failures(results):
        parts.append("\n".join(["Failed:", "", *(f"- {line}" for line in failed)]))
    parts += left_out(results)
    if study.paper is not None:
        note = (study.paper.note or study.where).removesuffix(".")
        parts.append(f"The paper's figures ({note}) beside ours:")
        parts.append(markdown_table(paper_table(results)))
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """A table whose first column is text and whose others are numbers.

    >>> from tcm.studies.words import Cell
    >>> print(markdown_table((["variant", "FID"], [[Cell("a | b"), Cell("2.5", strong=True)]])))
    | variant | FID |
    | --- | ---: |
    | a \\| b | **2.5** |
    """
    heads, rows = table
    rule = ["---", *["---:"] * (len(heads) - 1)]
    marked = [[f"**{cell.text}**" if cell.strong else cell.text for cell in row] for row in rows]
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (heads, rule, *marked)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
