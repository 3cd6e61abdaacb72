// The choice of a class: a button for each; with "mix several", each chosen class gets a weight.

import { byId, byIds } from "./dom.js";

const MOST_BUTTONS = 24;

/** Fill the field with buttons for the model's classes; with many classes, a list to choose from. */
export function classField(model, store) {
  const field = byId("classes");
  if (model.classes.length === 0) return;
  field.hidden = false;
  const [buttons, weights, list] = byIds("class-buttons", "class-weights", "class-list");
  const several = byId("class-mix");
  const all = model.classes.length <= MOST_BUTTONS;

  function choose(index) {
    const { mix } = store.get();
    const chosen = new Map(several.checked ? mix : []);
    if (index === null) chosen.clear();
    else if (several.checked && mix.has(index)) chosen.delete(index);
    else chosen.set(index, 100);
    store.set({ mix: chosen });
  }

  function classButton(index) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "chip";
    button.textContent = index === null ? "from the seed" : model.classes[index];
    button.dataset.index = index ?? "";
    button.addEventListener("click", () => choose(index));
    return button;
  }

  function showButtons() {
    const { mix } = store.get();
    const wanted = all ? model.classes.keys() : mix.keys();
    if (!all || buttons.childElementCount === 0) {
      buttons.replaceChildren(classButton(null), ...[...wanted].map(classButton));
    }
    for (const button of buttons.children) {
      const { index } = button.dataset;
      button.setAttribute("aria-pressed", index === "" ? mix.size === 0 : mix.has(Number(index)));
    }
  }

  function showWeights() {
    const { mix } = store.get();
    weights.hidden = mix.size < 2;
    if ([...weights.children].map((row) => Number(row.dataset.index)).join() === [...mix.keys()].join()) return;
    weights.replaceChildren(...[...mix.keys()].map(weightRow));
  }

  function weightRow(index) {
    const row = document.createElement("label");
    row.dataset.index = index;
    const slider = document.createElement("input");
    Object.assign(slider, { type: "range", min: 1, max: 100, value: store.get().mix.get(index) });
    slider.addEventListener("input", () => {
      store.set({ mix: new Map(store.get().mix).set(index, Number(slider.value)) });
    });
    row.append(model.classes[index], slider);
    return row;
  }

  if (!all) {
    list.hidden = false;
    list.append(new Option("choose a class", ""), ...model.classes.map((name, index) => new Option(name, index)));
    list.addEventListener("change", () => list.value !== "" && choose(Number(list.value)));
  }
  several.addEventListener("change", () => {
    const [first] = store.get().mix;
    if (!several.checked && store.get().mix.size > 1) store.set({ mix: new Map([first]) });
  });
  function show() {
    if (store.get().mix.size > 1) several.checked = true; // a link may say so
    showButtons();
    showWeights();
  }
  store.onChange((changed) => changed.includes("mix") && show());
  show();
}
