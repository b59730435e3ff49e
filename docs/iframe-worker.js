// Search without a server. Browsers refuse to start workers on pages opened from disk, so there the search worker of the
// theme runs in a hidden frame instead; the theme recognises the name IFrameWorker and then loads its files accordingly.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      const load = (source) =>
        new Promise((done, failed) => {
          const script = inside.document.createElement("script")
          Object.assign(script, { src: source, onload: done, onerror: failed })
          inside.document.body.append(script)
        })
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = async (...sources) => {
        for (const source of sources) await load(source)
      }
      this.ready = load(new URL(url, location.href).href)
      this.inside = inside
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.inside.frameElement.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
