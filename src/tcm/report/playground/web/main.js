// The page: settings at the top, and three parts that show what the model makes of them.

import { classField } from "./classes.js";
import { byId, byIds } from "./dom.js";
import { drawingPart } from "./drawing.js";
import { startEngine } from "./engine.js";
import { classOf, normal } from "./noise.js";
import { sampled, samplesPart } from "./samples.js";
import { isSeed, readSettings, settingsStore, writeSettings } from "./settings.js";
import { sliderPart } from "./slider.js";
import { themeButton } from "./theme.js";
import { timeSlider } from "./timescale.js";

const ADDRESS_MILLISECONDS = 150;

async function main() {
  const model = JSON.parse(byId("model").textContent);
  model.size = model.shape.reduce((product, side) => product * side, 1);
  const store = settingsStore(readSettings(model, location.hash));
  themeButton(byId("theme"));
  classField(model, store);
  seedField(model, store);
  stepsField(model, store);

  const engine = startEngine(model.shape);
  const f = async (...batch) => (await engine)(...batch);
  const samples = samplesPart(model, f, store);
  const slider = sliderPart(model, f, store);
  const drawing = drawingPart(model, f, store, samples.chosen);
  keepInAddress(model, store);
  linkButton(store);
  shortcuts(slider);
  document.body.dataset.state = "loading";

  await engine;
  document.body.dataset.state = "ready";
  await samples.fill();
  await Promise.all([slider.showAll(), drawing.begin()]);
  document.body.dataset.state = "done";
  // For the console: pixels of the images of some seeds, and what a seed stands for.
  window.playground = {
    sample: (seeds, settings = {}) => sampled(model, f, { ...store.get(), ...settings }, seeds),
    normal,
    classOf,
  };
}

function seedField(model, store) {
  const field = byId("seed");
  const show = () => (field.value = store.get().seed);
  field.addEventListener("change", () => {
    if (field.value !== "" && isSeed(Number(field.value))) store.set({ seed: Number(field.value) });
    else show();
  });
  const buttons = {
    previous: () => Math.max(0, store.get().seed - model.grid),
    next: () => store.get().seed + model.grid,
    random: () => Math.floor(Math.random() * 1_000_000),
  };
  for (const [id, seed] of Object.entries(buttons)) {
    byId(id).addEventListener("click", () => store.set({ seed: seed() }));
  }
  store.onChange(show);
  show();
}

function stepsField(model, store) {
  const second = byId("second");
  const row = byId("second-row");
  const options = { low: model.tMin, high: model.highestSecondTime, value: store.get().second, label: "t" };
  const showTime = timeSlider(second, byId("second-shown"), options, (time) => store.set({ second: time }));
  const radios = [...document.querySelectorAll("input[name=steps]")];
  radios.forEach((radio) => radio.addEventListener("change", () => store.set({ steps: Number(radio.value) })));
  function show() {
    radios.forEach((radio) => (radio.checked = Number(radio.value) === store.get().steps));
    second.disabled = store.get().steps === 1;
    row.classList.toggle("off", second.disabled);
  }
  store.onChange((changed) => {
    show();
    if (changed.length > 1) showTime(store.get().second); // a link was followed
  });
  show();
}

/** The address follows the settings a little later, as browsers refuse many changes a second, and they follow it. */
function keepInAddress(model, store) {
  let timer = null;
  store.onChange(() => {
    clearTimeout(timer);
    timer = setTimeout(() => history.replaceState(null, "", writeSettings(store.get())), ADDRESS_MILLISECONDS);
  });
  addEventListener("hashchange", ({ newURL }) => store.set(readSettings(model, new URL(newURL).hash)));
}

function linkButton(store) {
  const [button, said] = byIds("link", "said");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(location.href.split("#")[0] + writeSettings(store.get()));
      said.textContent = "Copied.";
    } catch {
      said.textContent = "Copy this page's address: it is the link.";
    }
    setTimeout(() => (said.textContent = ""), 3000);
  });
}

/** Single keys, where nothing else takes them. */
function shortcuts(slider) {
  const press = (id) => () => byId(id).click();
  const keys = {
    r: press("random"),
    n: press("next"),
    b: press("previous"),
    1: press("one"),
    2: press("two"),
    p: slider.toggle,
  };
  addEventListener("keydown", (event) => {
    const writing = event.target.matches("input:not([type=radio], [type=checkbox], [type=range]), select, textarea");
    if (writing || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    keys[event.key]();
  });
}

addEventListener("unhandledrejection", ({ reason }) => {
  const problem = byId("problem");
  problem.hidden = false;
  problem.textContent = `The model does not run in this browser: ${reason.message}`;
  document.body.dataset.state = "failed";
});
main();
