//! Answers of S3 as trees of elements. Services write them with and without namespaces, prefixes, attributes
//! and line breaks: only local names and texts count here.
//!
//! Invariant: a document that ends early, or has anything after its root, is an error and never an answer.
use quick_xml::Reader;
use quick_xml::events::{BytesRef, BytesStart, Event};
use quick_xml::name::QName;

/// Elements within each other: answers of S3 have five at most.
const DEPTH_MAX: usize = 16;

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Element {
    /// Without its prefix.
    pub(super) name: String,
    /// The texts directly in it, one after the other.
    text: String,
    children: Vec<Element>,
}

impl Element {
    /// The root of a document.
    pub(super) fn parse(document: &str) -> Result<Element, String> {
        let mut reader = Reader::from_str(document);
        // The outermost one stands for the document.
        let mut open = vec![Element::default()];
        loop {
            let event = reader.read_event();
            let event = event.map_err(|e| format!("byte {}: {e}", reader.error_position()))?;
            match event {
                Event::Start(start) if open.len() <= DEPTH_MAX => open.push(Element::of(&start)),
                Event::Start(_) => {
                    return Err(format!("more than {DEPTH_MAX} elements are within each other"));
                }
                Event::Empty(empty) => add(&mut open, Element::of(&empty))?,
                Event::End(_) => {
                    let ended = open.pop().ok_or("an element ends that was not begun")?;
                    add(&mut open, ended)?;
                }
                Event::Text(text) => put(&mut open, &text.xml10_content()),
                Event::CData(text) => put(&mut open, &text.xml10_content()),
                Event::GeneralRef(entity) => put(&mut open, &meaning(&entity)?),
                Event::Eof => break,
                Event::Decl(_) | Event::Comment(_) | Event::PI(_) | Event::DocType(_) => {}
            }
        }
        let [document] = &mut open[..] else {
            return Err("it ends within an element".into());
        };
        if !document.text.trim().is_empty() {
            return Err("it has text outside its root".into());
        }
        match (document.children.pop(), document.children.is_empty()) {
            (Some(root), true) => Ok(root),
            (root, _) => {
                Err(format!("it has {} root elements", if root.is_some() { "several" } else { "no" }))
            }
        }
    }

    fn of(start: &BytesStart<'_>) -> Element {
        Element { name: local(start.name()), ..Element::default() }
    }

    pub(super) fn all(&self, name: &'static str) -> impl Iterator<Item = &Element> {
        self.children.iter().filter(move |child| child.name == name)
    }

    /// The text of the first child with this name, without space around it.
    pub(super) fn text_of(&self, name: &str) -> Option<&str> {
        self.exact_text_of(name).map(str::trim)
    }

    /// The text of the first child with this name, with all its space, as in keys.
    pub(super) fn exact_text_of(&self, name: &str) -> Option<&str> {
        self.children.iter().find(|child| child.name == name).map(|child| child.text.as_str())
    }
}

fn local(name: QName<'_>) -> String {
    name.local_name().as_ref().to_owned()
}

fn add(open: &mut [Element], ended: Element) -> Result<(), String> {
    open.last_mut().ok_or("an element ends that was not begun")?.children.push(ended);
    Ok(())
}

fn put(open: &mut [Element], text: &str) {
    if let Some(element) = open.last_mut() {
        element.text.push_str(text);
    }
}

/// The characters that an entity stands for: by number, or one of the five names of XML.
fn meaning(entity: &BytesRef<'_>) -> Result<String, String> {
    if let Some(character) = entity.resolve_char_ref().map_err(|e| e.to_string())? {
        return Ok(character.into());
    }
    let known = quick_xml::escape::resolve_xml_entity(entity);
    known.map(str::to_owned).ok_or_else(|| format!("XML has no entity &{};", &**entity))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(document: &str) -> Element {
        Element::parse(document).unwrap()
    }

    #[test]
    fn names_count_without_prefixes_and_attributes() {
        let odd = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<!-- hello -->\n<s3:ListMultipartUploadsResult \
                   xmlns:s3='http://s3.amazonaws.com/doc/2006-03-01/'>\n <s3:Upload a=\"x>y\">\n  <s3:Key xml:lang = 'en' >a</s3:Key>\n\
                   <s3:UploadId>\n 7 </s3:UploadId><s3:Empty/></s3:Upload>\n<s3:Upload/></s3:ListMultipartUploadsResult>\n";
        let root = parsed(odd);
        assert_eq!(root.name, "ListMultipartUploadsResult");
        let uploads: Vec<&Element> = root.all("Upload").collect();
        assert_eq!(uploads.len(), 2);
        assert_eq!((uploads[0].text_of("Key"), uploads[0].text_of("UploadId")), (Some("a"), Some("7")));
        assert_eq!(
            (uploads[0].text_of("Empty"), uploads[0].text_of("None"), uploads[1].text_of("Key")),
            (Some(""), None, None)
        );
    }

    #[test]
    fn entities_and_cdata_are_texts() {
        let root = parsed("<A><Key>&lt;&#34;&#x27;&#228;&#x1F600;&amp;amp;&gt; <![CDATA[<b>&]]></Key></A>");
        assert_eq!(root.text_of("Key"), Some("<\"'ä\u{1F600}&amp;> <b>&"));
        assert_eq!(parsed("<A><Key> a&#32;</Key></A>").exact_text_of("Key"), Some(" a "));
    }

    #[test]
    fn malformed_documents_are_errors() {
        let deep = "<a>".repeat(40) + &"</a>".repeat(40);
        let bad = [
            ("", "no root"),
            (" \n", "no root"),
            ("hello", "outside"),
            ("<A><B>", "within"),
            ("<A><B></A>", ""),
            ("<A/><B/>", "several root"),
            ("<A/>x", "outside"),
            ("<A>&unknown;</A>", "no entity &unknown;"),
            ("<A>&#0;</A>", ""),
            ("<A>&#xFFFFFFFF;</A>", ""),
            ("<A><Key>x</Key", ""),
            ("</A>", ""),
            (&deep, "within each other"),
        ];
        for (document, why) in bad {
            let error = Element::parse(document).unwrap_err();
            assert!(error.contains(why), "{document}: {error}");
        }
    }
}
