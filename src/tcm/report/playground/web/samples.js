// The grid of samples, which fills as they are made, and the chosen one large.

import { byId, byIds } from "./dom.js";
import { latestOnly } from "./pacing.js";
import { draw, savePng, sheetOf, sized, toPixels } from "./pixels.js";
import { consistencySteps, noisesOf } from "./sampling.js";
import { className, classRows, timesOf } from "./settings.js";

const SECONDS_PER_BATCH = 0.06;
const MOST_AT_ONCE = 32;

/** Pixels of the images of some seeds, one after the other. */
export async function sampled(model, f, settings, seeds) {
  const noise = (step) => noisesOf(seeds, step, model.size);
  return toPixels(await consistencySteps(f, timesOf(model, settings), noise, classRows(model, settings.mix, seeds)));
}

export function samplesPart(model, f, store) {
  const grid = byId("grid");
  const large = sized(byId("large"), model.shape);
  const [caption, command, speed] = byIds("caption", "command", "speed");
  const columns = Math.sqrt(model.grid);
  const cells = gridCells(model, grid);
  const images = [];
  let batch = 1;

  const fill = latestOnly(async (isOutdated) => {
    const settings = store.get();
    const start = performance.now();
    grid.setAttribute("aria-busy", "true");
    for (let done = 0; done < cells.length;) {
      const seeds = cells.slice(done, done + batch).map((_, i) => settings.seed + done + i);
      const before = performance.now();
      const pixels = await sampled(model, f, settings, seeds);
      if (isOutdated()) return;
      seeds.forEach((seed, i) => show(done + i, seed, pixels.subarray(i * model.size, (i + 1) * model.size)));
      done += seeds.length;
      const perImage = (performance.now() - before) / 1000 / seeds.length;
      batch = Math.max(1, Math.min(MOST_AT_ONCE, Math.floor(SECONDS_PER_BATCH / perImage)));
    }
    grid.setAttribute("aria-busy", "false");
    const rate = (1000 * cells.length) / (performance.now() - start);
    speed.textContent = `${rate.toLocaleString("en", { maximumFractionDigits: rate < 10 ? 1 : 0 })} images/s`;
  });

  function show(index, seed, pixels) {
    images[index] = pixels;
    draw(cells[index].firstElementChild, pixels, model.shape);
    cells[index].setAttribute("aria-label", described(model, store.get(), seed));
    if (index === store.get().image) showLarge();
  }

  function showLarge() {
    const settings = store.get();
    const seed = settings.seed + settings.image;
    if (!images[settings.image]) return;
    draw(large, images[settings.image], model.shape);
    caption.textContent = described(model, settings, seed);
    large.setAttribute("aria-label", `The chosen image: ${caption.textContent}`);
    command.textContent = commandOf(model, settings, seed);
  }

  function choose(index) {
    store.set({ image: index });
    cells[index].focus({ preventScroll: true });
  }

  cells.forEach((cell, index) => cell.addEventListener("click", () => choose(index)));
  grid.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    const index = store.get().image + (moves[event.key] ?? NaN);
    if (!(index >= 0 && index < cells.length)) return;
    event.preventDefault();
    choose(index);
  });
  byId("save").addEventListener("click", () => {
    savePng(sheetOf([large], 1), `${model.file}-${store.get().seed + store.get().image}.png`);
  });
  byId("save-grid").addEventListener("click", () => {
    const canvases = cells.map((cell) => cell.firstElementChild);
    savePng(sheetOf(canvases, columns), `${model.file}-${store.get().seed}-${store.get().seed + cells.length - 1}.png`);
  });

  function mark() {
    cells.forEach((cell, index) => {
      cell.setAttribute("aria-selected", index === store.get().image);
      cell.tabIndex = index === store.get().image ? 0 : -1;
    });
  }
  store.onChange((changed) => {
    if (changed.includes("image")) {
      mark();
      showLarge();
    }
    if (changed.some((name) => name !== "image")) fill();
  });
  mark();
  return { fill, chosen: () => images[store.get().image] };
}

function gridCells(model, grid) {
  grid.style.setProperty("--columns", Math.sqrt(model.grid));
  const cells = Array.from({ length: model.grid }, () => {
    const cell = document.createElement("div");
    cell.setAttribute("role", "option");
    cell.append(sized(document.createElement("canvas"), model.shape));
    return cell;
  });
  grid.append(...cells);
  return cells;
}

function described(model, settings, seed) {
  const name = className(model, settings.mix, seed);
  return [`seed ${seed}`, name && `class ${name}`].filter(Boolean).join(", ");
}

/** The command that draws the same image; none draws a mix. */
function commandOf(model, settings, seed) {
  if (settings.mix.size > 1) return "";
  const words = ["tcm sample", model.command, `--seeds ${seed}`];
  if (settings.mix.size) words.push(`--class ${[...settings.mix.keys()][0]}`);
  if (settings.steps === 2) {
    words.push(settings.second === model.secondTime ? "--steps 2" : `--times ${model.tMax},${settings.second}`);
  }
  return words.join(" ");
}
