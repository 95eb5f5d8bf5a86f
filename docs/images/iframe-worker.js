// Pages opened from disk cannot start workers. There, the worker of the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      this.inside = frame.contentWindow;
      addEventListener("message", ({ source, data }) => {
        if (source === this.inside) this.dispatchEvent(new MessageEvent("message", { data }));
      });
      const page = this.inside.document;
      page.open();
      page.write("<script>postMessage = data => parent.postMessage(data, '*')</script>");
      page.write(`<script src="${url}"></script>`);
      page.close();
      this.ready = new Promise((done) => (this.inside.onload = done));
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
