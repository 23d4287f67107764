//! Writes one JSON document of any size in pieces.

use std::io::{self, Write};

use serde_json::Value;
use ubtrfs_format::print::json_line;

/// Writes nested objects and arrays. Each object and array that was opened must be closed with [`JsonStream::close`],
/// the innermost first.
pub(super) struct JsonStream<W> {
    out: W,
    /// For each open array or object, its closing bracket and whether it has content yet.
    open: Vec<(&'static str, bool)>,
}

impl<W: Write> JsonStream<W> {
    pub(super) fn new(out: W) -> Self {
        Self { out, open: Vec::new() }
    }

    fn separate(&mut self) -> io::Result<()> {
        let indent = self.open.len();
        if let Some((_, has_content)) = self.open.last_mut() {
            let comma = if std::mem::replace(has_content, true) { "," } else { "" };
            write!(self.out, "{comma}\n{:indent$}", "")?;
        }
        Ok(())
    }

    /// Opens an object as an element of an array, or at the top.
    pub(super) fn object(&mut self) -> io::Result<()> {
        self.separate()?;
        self.open.push(("}", false));
        self.out.write_all(b"{")
    }

    /// Adds a field to the open object.
    pub(super) fn field(&mut self, name: &str, value: &Value) -> io::Result<()> {
        self.separate()?;
        write!(self.out, "{}: {}", Value::from(name), json_line(value))
    }

    /// Opens an array as a field of the open object.
    pub(super) fn array(&mut self, name: &str) -> io::Result<()> {
        self.separate()?;
        self.open.push(("]", false));
        write!(self.out, "{}: [", Value::from(name))
    }

    /// Adds an element to the open array.
    pub(super) fn element(&mut self, value: &Value) -> io::Result<()> {
        self.separate()?;
        self.out.write_all(json_line(value).as_bytes())
    }

    /// Closes the array or object that was opened last.
    pub(super) fn close(&mut self) -> io::Result<()> {
        let Some((bracket, has_content)) = self.open.pop() else { return Ok(()) };
        let indent = self.open.len();
        if has_content {
            write!(self.out, "\n{:indent$}", "")?;
        }
        self.out.write_all(bracket.as_bytes())?;
        if self.open.is_empty() {
            self.out.write_all(b"\n")?;
            self.out.flush()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn streamed_parts_form_one_document() {
        let mut bytes = Vec::new();
        let mut stream = JsonStream::new(&mut bytes);
        stream.object().unwrap();
        stream.field("a \"name\"", &json!(1)).unwrap();
        stream.array("trees").unwrap();
        for _ in 0..2 {
            stream.object().unwrap();
            stream.array("blocks").unwrap();
            stream.element(&json!({ "bytenr": 4096 })).unwrap();
            stream.element(&json!("text")).unwrap();
            stream.close().unwrap();
            stream.array("empty").unwrap();
            stream.close().unwrap();
            stream.close().unwrap();
        }
        stream.close().unwrap();
        stream.close().unwrap();
        let tree = json!({ "blocks": [{ "bytenr": 4096 }, "text"], "empty": [] });
        let read: Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(read, json!({ "a \"name\"": 1, "trees": [tree.clone(), tree] }));
    }
}
