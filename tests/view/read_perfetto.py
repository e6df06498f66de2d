"""What Perfetto's own schema (the package `perfetto`) makes of a trace, as JSON: what it does not know, what does not fit,
and how many there are of what."""

import collections
import json
import sys

from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

wrong = collections.Counter()
trace = Trace.FromString(open(sys.argv[1], "rb").read())


def look(message):
    for field in UnknownFieldSet(message):
        wrong[f"{message.DESCRIPTOR.name} has no field {field.field_number}"] += 1
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for one in value if isinstance(value, collections.abc.Iterable) else [value]:
                look(one)


tracks, open_slices, names, argument_names = {}, collections.defaultdict(list), {}, {}
slices, counters, arguments, flows = (collections.Counter() for _ in range(4))
clocks, last_ns = set(), collections.Counter()
for packet in trace.packet:
    look(packet)
    if packet.HasField("clock_snapshot"):
        clocks |= {clock.clock_id for clock in packet.clock_snapshot.clocks}
    sequence = packet.trusted_packet_sequence_id
    for name in packet.interned_data.event_names:
        names[sequence, name.iid] = name.name
    for name in packet.interned_data.debug_annotation_names:
        argument_names[sequence, name.iid] = name.name
    if packet.HasField("track_descriptor"):
        track = packet.track_descriptor
        if track.parent_uuid and track.parent_uuid not in tracks:
            wrong["a track comes before the one that it is on"] += 1
        tracks[track.uuid] = track
    if not packet.HasField("track_event"):
        continue
    event = packet.track_event
    if event.track_uuid not in tracks:
        wrong["an event is on no track"] += 1
        continue
    track = tracks[event.track_uuid]
    name = event.name or names.get((sequence, event.name_iid), "")
    if event.type in (TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_INSTANT):
        root = track
        while root.parent_uuid:
            root = tracks[root.parent_uuid]
        slices[root.name or "process"] += 1
        for argument in event.debug_annotations:
            arguments[argument.name or argument_names.get((sequence, argument.name_iid), "")] += 1
        flows.update(event.flow_ids)
        flows.update(event.terminating_flow_ids)
        if not name:
            wrong["a slice has no name"] += 1
    if event.type == TrackEvent.TYPE_SLICE_BEGIN:
        open_slices[event.track_uuid].append(packet.timestamp)
    elif event.type == TrackEvent.TYPE_SLICE_END:
        if not open_slices[event.track_uuid]:
            wrong["a slice ends that has not begun"] += 1
        elif open_slices[event.track_uuid].pop() > packet.timestamp:
            wrong["a slice ends before it begins"] += 1
    elif event.type == TrackEvent.TYPE_COUNTER:
        counters[track.name] += 1
        if not track.HasField("counter"):
            wrong["a value is on a track that is no counter"] += 1
    # On one track time goes on.
    if packet.timestamp < last_ns[event.track_uuid]:
        wrong["an event of a track comes too late"] += 1
    last_ns[event.track_uuid] = packet.timestamp
wrong["slices that do not end"] += sum(map(len, open_slices.values()))
wrong["flows that lead nowhere"] += sum(count < 2 for count in flows.values())
print(json.dumps({
    "wrong": {text: count for text, count in wrong.items() if count},
    "tracks": len(tracks),
    "slices": slices,
    "counters": counters,
    "flows": len(flows),
    "arguments": arguments,
    "clocks": sorted(clocks),
}))
