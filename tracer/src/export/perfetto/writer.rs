//! Packets of a trace, one at a time: names are interned, times are CLOCK_MONOTONIC ns.

use std::collections::HashMap;
use std::io::{self, Write};

use prost::Message as _;

use super::proto::{
    COUNTER, Clock, ClockSnapshot, CounterDescriptor, DebugAnnotation, INCREMENTAL_STATE_CLEARED, INSTANT,
    InternedData, InternedName, MONOTONIC, NEEDS_INCREMENTAL_STATE, REALTIME, SLICE_BEGIN, SLICE_END,
    TracePacket, TracePacketDefaults, TrackDescriptor, TrackEvent,
};

/// All packets are of one sequence.
const SEQUENCE: u32 = 1;

/// A value of an event.
pub(super) enum Value {
    Number(u64),
    Text(String),
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        Self::Number(number.into())
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

/// Names and values of an event.
pub(super) type Args<'a> = Vec<(&'a str, Value)>;

/// Identifies a track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Track(u64);

pub(super) struct Writer<W> {
    out: W,
    tracks: u64,
    names: HashMap<String, u64>,
    annotations: HashMap<String, u64>,
    texts: HashMap<String, u64>,
    packet: Vec<u8>,
}

impl<W: Write> Writer<W> {
    /// Begins a trace: its clock, and what CLOCK_REALTIME was at its start, where that is known.
    pub(super) fn begin(out: W, started_ns: u64, realtime_ns: Option<u64>) -> io::Result<Self> {
        let (names, annotations, texts) = Default::default();
        let mut writer = Self { out, tracks: 0, names, annotations, texts, packet: Vec::new() };
        let clock = |id, timestamp| Clock { clock_id: Some(id), timestamp: Some(timestamp) };
        let clocks = [Some(clock(MONOTONIC, started_ns)), realtime_ns.map(|ns| clock(REALTIME, ns))];
        writer.write(TracePacket {
            clock_snapshot: Some(ClockSnapshot {
                clocks: clocks.into_iter().flatten().collect(),
                primary_trace_clock: Some(MONOTONIC),
            }),
            sequence_flags: Some(INCREMENTAL_STATE_CLEARED),
            trace_packet_defaults: Some(TracePacketDefaults { timestamp_clock_id: Some(MONOTONIC) }),
            ..TracePacket::default()
        })?;
        Ok(writer)
    }

    fn write(&mut self, packet: TracePacket) -> io::Result<()> {
        const PACKET_FIELD: u8 = 1 << 3 | 2;
        let packet = TracePacket { trusted_packet_sequence_id: Some(SEQUENCE), ..packet };
        self.packet.clear();
        self.packet.push(PACKET_FIELD);
        packet.encode_length_delimited(&mut self.packet).map_err(io::Error::other)?;
        self.out.write_all(&self.packet)
    }

    /// Adds a track; what is not given of the descriptor is empty.
    pub(super) fn track(
        &mut self,
        parent: Option<Track>,
        name: &str,
        descriptor: TrackDescriptor,
    ) -> io::Result<Track> {
        self.tracks += 1;
        let track = Track(self.tracks);
        self.write(TracePacket {
            track_descriptor: Some(TrackDescriptor {
                uuid: Some(track.0),
                name: Some(name.to_owned()),
                parent_uuid: parent.map(|parent| parent.0),
                ..descriptor
            }),
            ..TracePacket::default()
        })?;
        Ok(track)
    }

    pub(super) fn counter_track(
        &mut self,
        parent: Track,
        name: &str,
        unit: i32,
        unit_name: &str,
    ) -> io::Result<Track> {
        let unit_name = (!unit_name.is_empty()).then(|| unit_name.to_owned());
        let counter = Some(CounterDescriptor { unit: Some(unit), unit_name });
        self.track(Some(parent), name, TrackDescriptor { counter, ..TrackDescriptor::default() })
    }

    fn event(
        &mut self,
        track: Track,
        time_ns: u64,
        name: Option<&str>,
        args: Args,
        event: TrackEvent,
    ) -> io::Result<()> {
        let mut interned = InternedData::default();
        let name_iid = name.map(|name| intern(&mut self.names, name, &mut interned.event_names));
        let annotations = args.into_iter().map(|(name, value)| {
            let name_iid = intern(&mut self.annotations, name, &mut interned.debug_annotation_names);
            let (uint_value, string_value_iid) = match value {
                Value::Number(number) => (Some(number), None),
                Value::Text(text) => {
                    let texts = &mut interned.debug_annotation_string_values;
                    (None, Some(intern(&mut self.texts, &text, texts)))
                }
            };
            DebugAnnotation { name_iid: Some(name_iid), uint_value, string_value_iid }
        });
        let debug_annotations = annotations.collect();
        let is_new = interned != InternedData::default();
        self.write(TracePacket {
            timestamp: Some(time_ns),
            sequence_flags: Some(NEEDS_INCREMENTAL_STATE),
            interned_data: is_new.then_some(interned),
            track_event: Some(TrackEvent { track_uuid: Some(track.0), name_iid, debug_annotations, ..event }),
            ..TracePacket::default()
        })
    }

    /// Begins a slice from which flows go on.
    pub(super) fn begin_slice(
        &mut self,
        track: Track,
        time_ns: u64,
        name: &str,
        args: Args,
        flow_ids: Vec<u64>,
    ) -> io::Result<()> {
        let event = TrackEvent { r#type: Some(SLICE_BEGIN), flow_ids, ..TrackEvent::default() };
        self.event(track, time_ns, Some(name), args, event)
    }

    pub(super) fn end_slice(&mut self, track: Track, time_ns: u64) -> io::Result<()> {
        let event = TrackEvent { r#type: Some(SLICE_END), ..TrackEvent::default() };
        self.event(track, time_ns, None, Vec::new(), event)
    }

    /// An instant at which flows end.
    pub(super) fn instant(
        &mut self,
        track: Track,
        time_ns: u64,
        name: &str,
        args: Args,
        terminating_flow_ids: Vec<u64>,
    ) -> io::Result<()> {
        let event = TrackEvent { r#type: Some(INSTANT), terminating_flow_ids, ..TrackEvent::default() };
        self.event(track, time_ns, Some(name), args, event)
    }

    pub(super) fn count(&mut self, track: Track, time_ns: u64, value: u64) -> io::Result<()> {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        let event = TrackEvent { r#type: Some(COUNTER), counter_value: Some(value), ..TrackEvent::default() };
        self.event(track, time_ns, None, Vec::new(), event)
    }

    pub(super) fn finish(mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// The number of a name; a new one is added to `new`.
fn intern(known: &mut HashMap<String, u64>, name: &str, new: &mut Vec<InternedName>) -> u64 {
    if let Some(&iid) = known.get(name) {
        return iid;
    }
    let iid = known.len() as u64 + 1;
    known.insert(name.to_owned(), iid);
    new.push(InternedName { iid: Some(iid), name: Some(name.to_owned()) });
    iid
}
