// The network in a worker of its own, so that the page reacts while it computes.

import { byId } from "./dom.js";

/** Start the worker with what the page holds; returns `f(x, t, classes)` for batches of images of this shape. */
export async function startEngine(shape) {
  const [code, wasm, graph] = await Promise.all(["runtime", "wasm", "graph"].map(embedded));
  const source = new Blob([byId("worker").textContent], { type: "text/javascript" });
  const worker = new Worker(URL.createObjectURL(source)); // Chromium starts no module worker from a file
  const waiting = new Map();
  let asked = 0;

  const showWaiting = () => (document.body.dataset.waiting = waiting.size);
  worker.onmessage = ({ data: { id, x, error } }) => {
    const { resolve, reject } = waiting.get(id);
    waiting.delete(id);
    showWaiting();
    if (error) reject(new Error(error));
    else resolve(x);
  };

  worker.onerror = ({ message }) => {
    waiting.forEach(({ reject }) => reject(new Error(message || "the worker does not start")));
    waiting.clear();
  };

  function ask(message, transferred) {
    return new Promise((resolve, reject) => {
      waiting.set(asked, { resolve, reject });
      showWaiting();
      worker.postMessage({ id: asked++, ...message }, transferred);
    });
  }

  await ask({ start: { code, wasm, graph } }, [code, wasm, graph]);
  const size = shape.reduce((product, side) => product * side, 1);
  return (x, t, classes) => ask({ batch: { x, shape: [x.length / size, ...shape], t, classes } }, []);
}

/** What the page holds under a name, compressed and as text. */
async function embedded(name) {
  const element = byId(name);
  const text = atob(element.textContent);
  element.remove();
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}
