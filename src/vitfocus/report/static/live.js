// The live page: the explorer's data come from the server that runs the models, for any picture and corruption.
window.vitfocusLive = (data, create) => {
  const live = data.live, settings = { corruption: live.corruption, severity: live.severity };
  const against = () => (settings.corruption === "none" ? "" : `${settings.corruption}/${settings.severity}`);
  let page = null, asked = null, slow = 0;

  async function ask(path, options = {}) {
    let answer;
    try {
      answer = await fetch(path, { ...options, headers: { "X-Token": live.token ?? "" }, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("the server does not answer. Start `vitfocus serve` again and open the address that it prints");
    }
    const content = await answer.json().catch(() => ({}));
    if (answer.ok) return content;
    throw new Error(answer.status === 403 ? "the server was started again: open the address that `vitfocus serve` printed" : (content.error ?? `the server answers ${answer.status}`).replace(/\.$/, ""));
  }
  const query = (values) => new URLSearchParams(values).toString();

  // What was looked at last is kept: a change of token, layer or head does not ask again.
  const looked = new Map();
  function look(image) {
    const values = query({ picture: data.images[image].id, against: against() });
    if (!looked.has(values)) {
      asked?.abort();
      const controller = asked = new AbortController();
      const found = ask(`look?${values}`, { signal: controller.signal }).finally(() => { if (asked === controller) asked = null; });
      looked.set(values, found);
      found.catch(() => looked.delete(values));
      if (looked.size > 32) looked.delete(looked.keys().next().value);
    }
    return looked.get(values);
  }
  function chunk(model, layer, image) {
    return ask(`maps?${query({ picture: data.images[image].id, against: against(), model, layer })}`);
  }

  async function give(blobs) {
    for (const blob of blobs) {
      const name = blob.name || "picture";
      try {
        if (blob.size > live.bytes) throw new Error(`${name} has more than ${live.bytes / 1e6} MB`);
        const found = await ask(`pictures?${query({ name })}`, { method: "POST", body: blob });
        const before = data.images.findIndex((image) => image.id === found.id);
        if (before < 0) data.images.push(found);
        page.state.image = before < 0 ? data.images.length - 1 : before;
        page.changed();
      } catch (error) { page.complain(error); }
    }
  }
  const file = create("input", { type: "file", accept: "image/*", multiple: "", id: "file", onchange: () => { give([...file.files]); file.value = ""; } });
  const choose = create("label", { class: "button", for: "file" }, "Choose a picture");

  // The camera: a picture is taken when asked for, and the camera is switched off when the dialog closes.
  const video = create("video", { autoplay: "", playsinline: "", "aria-label": "Camera" }); video.muted = true;
  const dialog = create("dialog", { "aria-label": "Camera", onclose: () => video.srcObject?.getTracks().forEach((track) => track.stop()) }, video,
    create("p", {}, create("button", { type: "button", id: "take", onclick: take }, "Take the picture"), " ",
      create("button", { type: "button", onclick: () => dialog.close() }, "Close")));
  const camera = create("button", { type: "button", id: "camera", onclick: async () => {
    try {
      video.srcObject = await navigator.mediaDevices.getUserMedia({ video: true });
      dialog.showModal();
    } catch (error) { page.complain(new Error(`there is no camera to use (${error.message})`)); }
  } }, "Camera");
  function take() {
    const canvas = create("canvas", { width: video.videoWidth, height: video.videoHeight });
    canvas.getContext("2d").drawImage(video, 0, 0);
    dialog.close();
    canvas.toBlob((blob) => give([new File([blob], `camera ${new Date().toLocaleTimeString()}`, { type: "image/jpeg" })]), "image/jpeg", 0.95);
  }

  const corruption = create("select", { "aria-label": "Corruption", "data-control": "corruption", onchange: () => { settings.corruption = corruption.value; showSettings(); page.changed(); } },
    ...["none", ...live.corruptions].map((name) => create("option", { value: name }, name.replaceAll("_", " "))));
  const told = create("output"), severity = create("input", { type: "range", min: 1, max: 5, step: 1, "aria-label": "Severity", "data-control": "severity",
    oninput: () => { settings.severity = Number(severity.value); showSettings(); clearTimeout(slow); slow = setTimeout(page.changed, 80); } });
  function showSettings() {
    corruption.value = settings.corruption;
    severity.value = settings.severity;
    told.textContent = String(settings.severity);
    severity.disabled = settings.corruption === "none";
  }
  showSettings();

  const files = (list) => [...(list ?? [])].filter((one) => one.type.startsWith("image/") || one.name);
  document.addEventListener("dragover", (event) => { if (event.dataTransfer.types.includes("Files")) { event.preventDefault(); document.body.classList.add("dropping"); } });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
  document.addEventListener("drop", (event) => { event.preventDefault(); document.body.classList.remove("dropping"); give(files(event.dataTransfer.files)); });
  document.addEventListener("paste", (event) => give(files(event.clipboardData?.files)));

  return {
    hint: "Give a picture (choose, drop or paste one, or use the camera), then point at a patch: the colours show what its token attends to. Click to pin a token.",
    controls: [create("div", { class: "give" }, file, choose, camera, create("label", {}, "Corruption ", corruption), create("label", {}, "Severity: ", told, " ", severity)), dialog],
    views: () => (against() ? ["clean", against()] : ["clean"]),
    look: async (image) => (await look(image)).models,
    chunk,
    tag: (image) => data.images[image].id,
    address: () => ({ corruption: settings.corruption, severity: settings.severity }),
    find: (id) => data.images.findIndex((image) => image.id === id),
    // A reloaded page asks for its picture again, which the server may still keep.
    restore: async (values) => {
      if (["none", ...live.corruptions].includes(values.get("corruption"))) settings.corruption = values.get("corruption");
      if (/^[1-5]$/.test(values.get("severity") ?? "")) settings.severity = Number(values.get("severity"));
      showSettings();
      const id = values.get("image") ?? "";
      if (/^[0-9a-f]{32}$/.test(id) && !data.images.some((image) => image.id === id)) {
        const found = await ask(`look?${query({ picture: id, against: "" })}`).catch(() => null);
        if (found) data.images.push(found.image);
      }
    },
    start: (given) => { page = given; },
  };
};
