//! Tests of the parser with an encoder of its own, and with invalid streams.

use super::*;
use crate::state::{device_stream::StateError, stream_remainder::StreamRemainder};
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Model {
    /// Name, pages, and whether the content is in the stream.
    blocks: Vec<(String, Vec<Option<u8>>, bool)>,
    /// Number of records after which another section begins.
    split: usize,
    commands: Vec<Vec<u8>>,
    /// Capabilities of the configuration, if it has one.
    configuration: Option<Vec<u8>>,
}

fn model() -> impl Strategy<Value = Model> {
    let block = (prop::collection::vec(prop::option::of(any::<u8>()), 1..6), any::<bool>());
    let blocks = prop::collection::vec(block, 1..5).prop_map(|blocks| {
        let named = |(index, (pages, travels))| (format!("block{index}"), pages, travels);
        blocks.into_iter().enumerate().map(named).collect()
    });
    let commands = prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..3);
    let configuration = prop::option::of(prop::collection::vec(0..20u8, 0..3));
    (blocks, 1..9usize, commands, configuration).prop_map(|(blocks, split, commands, configuration)| Model {
        blocks,
        split,
        commands,
        configuration,
    })
}

/// Page of the model: a fill byte, or none for mixed content.
fn page(fill: Option<u8>) -> Vec<u8> {
    match fill {
        Some(fill) => vec![fill; PAGE_SIZE],
        None => (0..PAGE_SIZE).map(|at| at as u8).collect(),
    }
}

fn open(out: &mut Vec<u8>, kind: u8) {
    out.push(kind);
    out.extend(2u32.to_be_bytes());
}

fn close(out: &mut Vec<u8>) {
    out.extend(FLAG_EOS.to_be_bytes());
    open(out, FOOTER);
}

fn encode(model: &Model) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    if let Some(capabilities) = &model.configuration {
        out.extend(b"\x07\0\0\0\x03q35");
        out.extend(b"\x05\x1aconfiguration/capabilities\0\0\0\x01");
        out.extend((capabilities.len() as u32).to_be_bytes());
        for len in capabilities {
            out.push(*len);
            out.extend(vec![b'c'; usize::from(*len)]);
        }
    }
    open(&mut out, START);
    out.extend(b"\x03ram\0\0\0\0\0\0\0\x04");
    let total: usize = model.blocks.iter().map(|(_, pages, _)| pages.len() * PAGE_SIZE).sum();
    out.extend((total as u64 | FLAG_MEM_SIZE).to_be_bytes());
    for (name, pages, _) in &model.blocks {
        out.push(name.len() as u8);
        out.extend(name.bytes());
        out.extend(((pages.len() * PAGE_SIZE) as u64).to_be_bytes());
        out.extend(0xfffc_0000u64.to_be_bytes());
    }
    close(&mut out);
    open(&mut out, PART);
    let mut records = 0;
    for (name, pages, _) in model.blocks.iter().filter(|(_, _, travels)| *travels) {
        let mut first = true;
        for (index, fill) in pages.iter().enumerate() {
            if records % model.split == model.split - 1 {
                close(&mut out);
                open(&mut out, PART);
                // QEMU names the block again only if another one was in between.
                first |= model.split.is_multiple_of(2);
            }
            let flag =
                if fill.is_some() { FLAG_ZERO } else { FLAG_PAGE } | if first { 0 } else { FLAG_CONTINUE };
            out.extend(((index * PAGE_SIZE) as u64 | flag).to_be_bytes());
            if first {
                out.push(name.len() as u8);
                out.extend(name.bytes());
            }
            match fill {
                Some(fill) => out.push(*fill),
                None => out.extend(page(None)),
            }
            first = false;
            records += 1;
        }
    }
    close(&mut out);
    for command in &model.commands {
        out.extend([COMMAND, 0, 9, 0, command.len() as u8]);
        out.extend(command);
    }
    open(&mut out, END);
    close(&mut out);
    out
}

fn check(head: &StreamHeader, model: &Model) -> Result<(), TestCaseError> {
    prop_assert_eq!(head.blocks().len(), model.blocks.len());
    for (block, (name, pages, travels)) in head.blocks().iter().zip(&model.blocks) {
        prop_assert_eq!(&block.name, name);
        let content = travels.then(|| pages.iter().flat_map(|fill| page(*fill)).collect::<Vec<_>>());
        prop_assert_eq!(&block.content, &content);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn what_is_parsed_is_what_was_written_and_survives_being_written_anew(model in model()) {
        let bytes = encode(&model);
        let stream = [&bytes[..], b"\x04devices\0"].concat();
        let cut = SplitStream::parse(&stream).unwrap();
        prop_assert_eq!(cut.devices, bytes.len());
        prop_assert!(cut.has_devices(&stream));
        check(&cut.head, &model)?;
        let mut head = cut.head;
        prop_assert_eq!(head.as_bytes(), &bytes[..]);
        head.rewrite();
        let again = StreamHeader::parse(head.as_bytes()).unwrap();
        check(&again, &model)?;
        prop_assert_eq!(&again.commands, &head.commands);
    }

    #[test]
    fn a_changed_page_is_found_in_the_rewritten_stream(model in model(), fill: u8, at in 0..PAGE_SIZE) {
        let mut head = StreamHeader::parse(&encode(&model)).unwrap();
        for index in 0..head.blocks().len() {
            let Some(mut now) = head.blocks()[index].content.clone() else { continue };
            let differs = now[at] != fill;
            now[at] = fill;
            prop_assert_eq!(head.update(index, &now), differs);
        }
        head.rewrite();
        let again = StreamHeader::parse(head.as_bytes()).unwrap();
        prop_assert_eq!(again.blocks(), head.blocks());
        prop_assert!(again.blocks().iter().filter_map(|block| block.content.as_ref()).all(|now| now[at] == fill));
    }

    #[test]
    fn what_was_read_ahead_and_what_is_sent_after_it_are_the_state(model in model(), other in model()) {
        let state = [&encode(&model)[..], b"\x04devices\0"].concat();
        let own = StreamHeader::parse(&state).unwrap();
        let rest = StreamRemainder::of(&state, Some(&own)).unwrap();
        prop_assert!(rest.head.is_none() && rest.sections.is_empty());
        prop_assert_eq!(rest.devices, b"\x04devices\0");

        let other = Model { configuration: model.configuration.clone(), ..other };
        let read = StreamHeader::parse(&encode(&other)).unwrap();
        let rest = StreamRemainder::of(&state, Some(&read)).unwrap();
        prop_assume!(rest.head.is_some());
        prop_assert_eq!([read.opening(), rest.sections, rest.devices].concat(), state.clone());
        check(&rest.head.unwrap(), &model)?;
        let alone = StreamRemainder::of(&state, None).unwrap();
        prop_assert_eq!([alone.sections, alone.devices].concat(), state);
    }

    #[test]
    fn a_state_that_opens_otherwise_than_what_was_read_is_refused(model in model()) {
        let state = [&encode(&model)[..], b"\x04devices\0"].concat();
        let configuration = model.configuration.is_none().then(Vec::new);
        let read = StreamHeader::parse(&encode(&Model { configuration, ..model })).unwrap();
        prop_assert!(matches!(StreamRemainder::of(&state, Some(&read)), Err(StateError::OtherMachine)));
    }

    #[test]
    fn a_stream_cut_off_anywhere_is_an_error(model in model(), cut: prop::sample::Index) {
        let bytes = encode(&model);
        prop_assert!(StreamHeader::parse(&bytes[..cut.index(bytes.len())]).is_err());
    }

    #[test]
    fn a_damaged_stream_never_panics_and_never_allocates_much(
        model in model(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = encode(&model);
        // The fields are at the front and between the pages: most damage should hit one.
        let fields: Vec<_> = (0..bytes.len()).filter(|at| *at < 200 || at % PAGE_SIZE < 60).collect();
        for (at, value) in damage {
            let at = fields[at.index(fields.len())];
            bytes[at] = value;
        }
        if let Ok(mut head) = StreamHeader::parse(&bytes) {
            let contents = head.blocks().iter().filter_map(|block| block.content.as_ref());
            prop_assert!(contents.map(|content| content.len() as u64).sum::<u64>() <= MAX_SMALL + PAGE_SIZE as u64);
            head.rewrite();
            prop_assert!(StreamHeader::parse(head.as_bytes()).is_ok());
        }
    }

    #[test]
    fn bytes_of_no_meaning_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = StreamHeader::parse(&bytes);
        let _ = StreamHeader::parse(&[&MAGIC[..], &bytes].concat());
    }
}

#[test]
fn guest_memory_in_a_stream_is_refused_before_it_is_allocated() {
    let mut out = MAGIC.to_vec();
    open(&mut out, START);
    out.extend(b"\x03ram\0\0\0\0\0\0\0\x04");
    let huge = 1u64 << 50;
    out.extend((huge | FLAG_MEM_SIZE).to_be_bytes());
    out.extend(b"\x04ram0");
    out.extend(huge.to_be_bytes());
    out.extend(0u64.to_be_bytes());
    close(&mut out);
    open(&mut out, END);
    out.extend(FLAG_ZERO.to_be_bytes());
    out.extend(b"\x04ram0\0");
    close(&mut out);
    assert_eq!(StreamHeader::parse(&out), Err(StreamError::TooMuchMemory));
}
