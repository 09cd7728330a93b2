// A value that views show, and that tells them when it changes.
import { useEffect, useState } from "preact/hooks";

export class Store<T> {
  private readonly told = new Set<(value: T) => void>();
  constructor(private value: T) {}
  get(): T {
    return this.value;
  }
  set(value: T): void {
    this.value = value;
    this.told.forEach((tell) => tell(value));
  }
  listen(tell: (value: T) => void): () => void {
    this.told.add(tell);
    return () => void this.told.delete(tell);
  }
  use(): T {
    const [value, show] = useState(this.value);
    useEffect(() => {
      show(this.value);
      return this.listen(show);
    }, []);
    return value;
  }
}
